"""Metrics of a run, under their public name: what ``ringlet.job`` records while it goes on."""

from ringlet.fusion.observe.metrics_control import Recording
from ringlet.job.observation import start_metrics, step_skipped

__all__ = ["Recording", "start_metrics", "step_skipped"]
