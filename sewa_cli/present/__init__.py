"""Present"""
