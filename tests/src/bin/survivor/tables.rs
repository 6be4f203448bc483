//! A variable that is too long for a description.

use super::{Counter, Status};
use mpsshim_api::cuda::*;
use mpsshim_tests::cu;

const BYTES: usize = 700_000;

pub struct Tables {
    table: CUdeviceptr,
    rounds: u32,
}

impl Tables {
    /// # Errors
    /// A call's status.
    pub fn new(stream: CUstream) -> Status<Tables> {
        let table = Counter::new(stream, BYTES)?.place(c"large")?;
        Ok(Tables { table, rounds: 0 })
    }

    fn pattern(&self) -> Vec<u8> {
        let byte = |at: usize| (at as u32).wrapping_mul(self.rounds) as u8;
        (0..BYTES).map(byte).collect()
    }

    /// Checks that it holds its last content, then writes another one. `None` if it does not.
    ///
    /// # Errors
    /// A call's status.
    pub fn round(&mut self) -> Status<Option<u32>> {
        let mut found = vec![0; BYTES];
        cu!(cuMemcpyDtoH_v2, found.as_mut_ptr(), self.table, BYTES).ok()?;
        if found != self.pattern() {
            return Ok(None);
        }
        self.rounds += 1;
        let next = self.pattern();
        cu!(cuMemcpyHtoD_v2, self.table, next.as_ptr(), BYTES).ok()?;
        Ok(Some(self.rounds))
    }
}
