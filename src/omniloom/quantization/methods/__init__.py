"""What a user names: one frozen config per method."""
