"""What is shown: charts, diagrams and the page on a run."""
