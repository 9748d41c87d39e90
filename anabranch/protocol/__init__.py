"""The state of a stream's tables and how it changes: state, publish, sealing, ledger, dead letters,
adoption, apply."""
