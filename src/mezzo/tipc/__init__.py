"""Certification: a TIPC configuration becomes a plan of commands, the plan is run, the run is reported."""
