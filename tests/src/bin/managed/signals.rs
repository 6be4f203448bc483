use super::*;
pub fn signals(_: &Setup, _: &mut Random, _: Instant) -> Outcome {
    Ok(())
}
pub fn before_the_driver() -> Outcome {
    Ok(())
}
