//! Arrays with two dimensions. They bind a session to its server.

use crate::call;
use crate::calls::{Status, same_bytes};
use crate::random::Random;
use mpsshim_api::cuda::*;

const AS_WORDS: u32 = 3;

pub struct Array {
    array: CUarray,
    row: usize,
    rows: usize,
    content: Vec<u8>,
}

impl Array {
    /// # Errors
    /// A call's status.
    pub fn new(random: &mut Random) -> Status<Array> {
        let (width, rows) = (random.between(1, 64), random.between(1, 16));
        let descriptor = CUDA_ARRAY_DESCRIPTOR {
            width: width as u64,
            height: rows as u64,
            format: AS_WORDS,
            channels: 1,
        };
        let mut array = CUarray::NULL;
        call!(cuArrayCreate_v2, &mut array, &raw const descriptor)?;
        let row = 4 * width;
        let mut array = Array {
            array,
            row,
            rows,
            content: Vec::new(),
        };
        array.write(random)?;
        Ok(array)
    }

    fn copy(&self) -> CUDA_MEMCPY2D {
        CUDA_MEMCPY2D {
            src_array: self.array.0,
            dst_array: self.array.0,
            src_pitch: self.row as u64,
            dst_pitch: self.row as u64,
            width: self.row as u64,
            height: self.rows as u64,
            ..CUDA_MEMCPY2D::default()
        }
    }

    /// # Errors
    /// A call's status.
    pub fn write(&mut self, random: &mut Random) -> Status {
        self.content = random.bytes(self.row * self.rows);
        let copy = CUDA_MEMCPY2D {
            src_type: CU_MEMORYTYPE_HOST,
            src_host: self.content.as_ptr() as u64,
            dst_type: CU_MEMORYTYPE_ARRAY,
            ..self.copy()
        };
        call!(cuMemcpy2D_v2, &raw const copy)
    }

    /// # Errors
    /// A call's status, or the difference.
    pub fn check(&self) -> Status {
        let mut found = vec![0u8; self.content.len()];
        let copy = CUDA_MEMCPY2D {
            src_type: CU_MEMORYTYPE_ARRAY,
            dst_type: CU_MEMORYTYPE_HOST,
            dst_host: found.as_mut_ptr() as u64,
            ..self.copy()
        };
        call!(cuMemcpy2D_v2, &raw const copy)?;
        same_bytes(|| "an array".into(), &found, &self.content)
    }

    /// # Errors
    /// A call's status.
    pub fn destroy(self) -> Status {
        call!(cuArrayDestroy, self.array)
    }
}
