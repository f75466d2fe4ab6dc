"""Output"""
