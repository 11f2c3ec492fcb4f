"""What programs written for Horovod import, beside the adapters' own modules."""
