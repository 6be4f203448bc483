//! Texture and surface objects, and their numbers.

use crate::engine::base::ordinal::Ordinal;
use crate::engine::gpu::Gpu;
use mpsshim_api::cuda::*;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Most objects with other numbers, beyond as many as the number itself, that are made in the search for it.
const MOST_OTHERS: u64 = 1 << 16;

/// A texture or surface object, by its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Object {
    /// `cuTexObjectCreate`.
    Texture(u64),
    /// `cuSurfObjectCreate`.
    Surface(u64),
}

impl Object {
    /// The number by which kernels name it.
    pub fn value(self) -> u64 {
        let (Object::Texture(value) | Object::Surface(value)) = self;
        value
    }

    /// Destroys the driver's object.
    ///
    /// # Errors
    /// Driver errors.
    pub fn end(self, device: Ordinal, gpu: &Gpu) -> Result<(), CUresult> {
        gpu.devices[device].make_current(&gpu.driver)?;
        let driver = &gpu.driver.array;
        match self {
            Object::Texture(object) => driver.tex_object_destroy(CUtexObject(object)),
            Object::Surface(object) => driver.surf_object_destroy(CUsurfObject(object)),
        }
    }
}

/// Objects that occupy numbers while the sessions of an earlier server are restored.
///
/// Kernels hold texture and surface objects by value, so the next server needs objects with the same values. The driver
/// numbers both kinds together, from 1 on in each context: a new context gives them in order, and a number that was given
/// back not before work has run (docs/design/0007-arrays.md). So objects are made until one has the number, in the order of
/// the numbers that are needed.
#[derive(Debug, Default)]
pub struct Numbers {
    others: Mutex<BTreeMap<(Ordinal, u64), Object>>,
    /// An array of each device for objects whose own resources are gone.
    arrays: Mutex<BTreeMap<Ordinal, CUarray>>,
}

impl Numbers {
    /// Makes an object with this number.
    ///
    /// # Errors
    /// Errors of `make`; `CUDA_ERROR_INVALID_VALUE` if none gets the number.
    pub fn make_with(
        &self,
        number: u64,
        (device, gpu): (Ordinal, &Gpu),
        make: impl Fn() -> Result<Object, CUresult>,
    ) -> Result<(), CUresult> {
        let mut others = self.others.lock();
        if let Some(other) = others.remove(&(device, number)) {
            other.end(device, gpu)?;
        }
        while (others.len() as u64) < number.saturating_add(MOST_OTHERS) {
            let made = make()?;
            if made.value() == number {
                return Ok(());
            }
            others.insert((device, made.value()), made);
        }
        Err(CUDA_ERROR_INVALID_VALUE)
    }

    /// Makes an object of an array of the server's that has this object's number, so that no other object gets it: the client
    /// has freed its array or memory, but not the object.
    ///
    /// # Errors
    /// As [`Numbers::make_with`].
    pub fn occupy(&self, object: Object, (device, gpu): (Ordinal, &Gpu)) -> Result<(), CUresult> {
        let driver = &gpu.driver.array;
        let array = {
            let mut arrays = self.arrays.lock();
            match arrays.get(&device) {
                Some(array) => *array,
                None => {
                    let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
                        width: 1,
                        format: CU_AD_FORMAT_UNSIGNED_INT8,
                        channels: 1,
                        flags: CUDA_ARRAY3D_SURFACE_LDST,
                        ..CUDA_ARRAY3D_DESCRIPTOR::default()
                    };
                    let mut array = CUarray::NULL;
                    driver.array3d_create(&mut array, &descriptor)?;
                    arrays.insert(device, array);
                    array
                }
            }
        };
        let mut resource = CUDA_RESOURCE_DESC {
            kind: CU_RESOURCE_TYPE_ARRAY,
            ..CUDA_RESOURCE_DESC::default()
        };
        resource.words[0] = array.0;
        self.make_with(object.value(), (device, gpu), || match object {
            Object::Surface(_) => {
                let mut made = CUsurfObject::NULL;
                driver.surf_object_create(&mut made, &resource)?;
                Ok(Object::Surface(made.0))
            }
            Object::Texture(_) => {
                let mut made = CUtexObject::NULL;
                let texture = CUDA_TEXTURE_DESC::default();
                driver.tex_object_create(&mut made, &resource, &texture, std::ptr::null())?;
                Ok(Object::Texture(made.0))
            }
        })
    }

    /// Destroys the objects with other numbers, once all sessions are restored.
    pub fn clear(&self, gpu: &Gpu) {
        for ((device, _), object) in std::mem::take(&mut *self.others.lock()) {
            if let Err(status) = object.end(device, gpu) {
                gpu.note_status(status);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{Fixture, Function};
    use std::collections::BTreeSet;

    static MADE: Mutex<(u64, BTreeSet<u64>)> = Mutex::new((0, BTreeSet::new()));

    /// Gives the next number, and no number again.
    extern "C" fn creates(to: *mut u64) -> CUresult {
        let mut made = MADE.lock();
        made.0 += 1;
        let number = made.0;
        made.1.insert(number);
        // SAFETY: as the driver's functions.
        unsafe { to.write(number) };
        CUDA_SUCCESS
    }

    extern "C" fn destroys(number: u64) -> CUresult {
        assert!(MADE.lock().1.remove(&number), "{number}");
        CUDA_SUCCESS
    }

    #[test]
    fn objects_get_the_numbers_that_they_had() {
        let functions = [
            ("cuTexObjectCreate", creates as Function),
            ("cuSurfObjectCreate", creates as Function),
            ("cuTexObjectDestroy", destroys as Function),
            ("cuSurfObjectDestroy", destroys as Function),
        ];
        let test = Fixture::new(&functions);
        let gpu = &test.shared.gpu;
        let device = gpu.devices.first().expect("a device").ordinal;
        let numbers = &gpu.texture_numbers;
        let make = |number| {
            numbers.make_with(number, (device, gpu), || {
                let mut made = CUtexObject::NULL;
                let (resource, texture) = Default::default();
                let view = std::ptr::null();
                let driver = &gpu.driver.array;
                driver.tex_object_create(&mut made, &resource, &texture, view)?;
                Ok(Object::Texture(made.0))
            })
        };
        let occupy = |object| numbers.occupy(object, (device, gpu));
        assert_eq!((make(3), make(7)), (Ok(()), Ok(())));
        assert_eq!(occupy(Object::Surface(9)), Ok(()));
        assert_eq!(occupy(Object::Texture(12)), Ok(()));
        assert_eq!(MADE.lock().1, (1..=12).collect());
        numbers.clear(gpu);
        assert_eq!(MADE.lock().1, BTreeSet::from([3, 7, 9, 12]));
        assert_eq!(make(5), Err(CUDA_ERROR_INVALID_VALUE), "never again");
    }
}
