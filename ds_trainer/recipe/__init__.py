"""What users write, as strict models: the recipe, the specs of tasks and techniques, schedules, jobs."""
