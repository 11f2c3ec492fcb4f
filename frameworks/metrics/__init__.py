"""Where metrics of a run go, and which of them the environment switches on."""
