"""The runtime: a single asyncio controller, worker groups, channels, device locks, stages. Imports no torch."""
