"""What runs beside serving: analysis and tuning of a bundle, in process.

The only part of the runtime that draws pictures and writes pages; the server never imports it.
"""
