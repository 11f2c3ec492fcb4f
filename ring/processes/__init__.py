"""One process of a job: how it is started, watched and signalled, and what it prints."""
