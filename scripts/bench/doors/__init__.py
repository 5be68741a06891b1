"""What doors cost and keep: authentication, certificates that change, quotas, deadlines without hope."""
