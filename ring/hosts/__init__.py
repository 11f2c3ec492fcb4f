"""The hosts of a job: names, network interfaces, the remote shell."""
