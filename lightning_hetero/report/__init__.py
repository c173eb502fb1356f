"""Charts, diagrams and the page on a run."""
