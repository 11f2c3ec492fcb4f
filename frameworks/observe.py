"""Metrics of a run, under the name that ``ringlet.observe`` has had: see ``ringlet.job``."""

from ringlet.fusion.observe.metrics_control import Recording
from ringlet.job.observation import start_metrics, step_skipped

__all__ = ["Recording", "start_metrics", "step_skipped"]
