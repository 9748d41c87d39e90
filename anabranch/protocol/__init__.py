"""What our tables say and how they change: state, publish, sealing, ledger, dead letters, adoption, apply."""
