"""Payload on connections of its own, beside gRPC: `connection` moves bytes, `plane` opens and lends them."""
