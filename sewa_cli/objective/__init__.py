"""Objective"""
