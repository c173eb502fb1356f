"""The planner: pure functions from a profile to a plan, without workers and torch.

Plans are compared by the `step_seconds` of their `Candidate` (`candidates`).
"""
