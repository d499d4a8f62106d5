"""Documents to tokenised, packed, verified MDS rows."""
