//! The name for which a mistyped one stands.

/// Longest mistyped name for which a near one is sought, bytes.
const LONGEST_MISTYPED: usize = 64;

/// The candidate that is nearest to a mistyped name, if one is near.
pub fn of<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > LONGEST_MISTYPED {
        return None;
    }
    let near = candidates.filter_map(|candidate| {
        let edits = strsim::damerau_levenshtein(name, candidate);
        // A third of the letters: `quti` is near quit, and `ab` near nothing.
        (edits * 3 <= name.len()).then_some((edits, candidate))
    });
    near.min().map(|(_, candidate)| candidate)
}
