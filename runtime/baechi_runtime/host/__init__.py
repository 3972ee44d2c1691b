"""The machine and this process: memory, processors, threads, interrupts, and the folder for what later runs may use again."""
