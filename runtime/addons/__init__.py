"""Add-ons: protocols and deployments that register by entry points; each can be deleted with its folder."""
