"""The doctor finds out, hop by hop, why a worker cannot be used."""
