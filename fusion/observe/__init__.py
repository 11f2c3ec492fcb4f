"""Eyes on the engine: timelines, metrics, exporters and reports."""
