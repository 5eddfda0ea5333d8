"""Exercises: functions of the course to write again, and a checker that names the mistake."""
