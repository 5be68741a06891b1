"""Drafts of the draft model: chains, trees and cascades."""
