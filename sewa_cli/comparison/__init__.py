"""Comparison"""
