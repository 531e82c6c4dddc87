"""The runtime: a single asyncio controller, worker groups, channels and device locks. Imports no torch."""
