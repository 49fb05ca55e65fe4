"""The engine: requests, the scheduler, the plan of a step, and the loop that launches and collects. No torch."""
