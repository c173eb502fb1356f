"""Which worker computes wrongly."""
