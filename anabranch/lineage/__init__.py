"""Lineage: the ledger's decisions as runs of OpenLineage, one for each hour that was accepted or
refused."""
