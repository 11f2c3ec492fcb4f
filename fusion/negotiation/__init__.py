"""The coordinator on rank 0: a pure state machine of requests, votes and messages."""
