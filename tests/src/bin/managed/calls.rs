use super::*;
pub fn calls(_: &Setup, _: &mut Random, _: Instant) -> Outcome {
    Ok(())
}
