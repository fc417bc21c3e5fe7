"""What people read: texts and pages made from values. Pure."""
