"""The mechanism: a forward that drops, a backward that replays."""
