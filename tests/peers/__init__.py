"""The ledger of peers: other libraries' MoE layers under `trimtab verify`, each failure reproduced outside of it."""
