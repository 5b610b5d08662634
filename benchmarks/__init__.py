"""Makes the figures of RESULTS.md; see README.md."""
