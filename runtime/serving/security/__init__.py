"""Who gets in: TLS, credentials, one gate before every method, and the addresses that are listened on."""
