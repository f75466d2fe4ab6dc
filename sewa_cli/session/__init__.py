"""Session"""
