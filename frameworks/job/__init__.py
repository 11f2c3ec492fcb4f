"""The job that this process is a rank of: joining, leaving, who is in it, and its objects."""
