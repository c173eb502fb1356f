"""What is drawn: facts in plain values, and functions from them to SVG, Mermaid and HTML."""
