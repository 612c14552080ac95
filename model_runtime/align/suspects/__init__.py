"""Why a place may diverge: for each kind of operation the usual mistakes, each tried or measured on the reference's own
numbers, so that what is said is what would make the product right."""
