"""The runtime: single controller on asyncio, worker groups, channels, device locks, stages. Imports neither torch nor ray."""
