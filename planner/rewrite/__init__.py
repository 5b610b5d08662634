"""The forward as a graph: captured from one eager call, checked by guards, run in checkpointed segments."""
