"""Jobs whose ranks come and go: finding hosts, who belongs to the job, and the launcher for it."""
