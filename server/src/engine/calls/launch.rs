//! `cuLaunchKernel`, `cuLaunchKernelEx`.

use crate::engine::base::call::{Call, Incoming};
use crate::engine::base::call_error::CallError;
use crate::engine::base::driver::{is_sticky, packed};
use crate::engine::base::moment::Want;
use crate::engine::base::printing::session::may_print;
use crate::engine::calls::capture::is_capturing;
use crate::engine::calls::function;
use crate::engine::calls::stream::{first_word, set_first_word};
use crate::engine::objects::levels::session::{confine, level, note_fill};
use crate::engine::objects::pace::Runs;
use crate::engine::objects::pace::session::{prepare_work, submitted_work};
use crate::engine::objects::times::session::note_recorded;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::message::{ATTRIBUTES_MAX, Launch, PARAMS_MAX};

const ATTRIBUTE: usize = size_of::<CUlaunchAttribute>();

/// Attributes of a launch in the driver's form, with the driver's handles.
pub struct Attributes {
    list: [CUlaunchAttribute; ATTRIBUTES_MAX],
    count: u32,
    /// Handles of events that the launch records.
    records: Vec<u64>,
}

/// `cuLaunchKernel(Ex)`.
pub fn launch(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, Launch>,
) -> Result<(), CallError> {
    let Call { body, message } = call;
    let function = function::function(session, shared, body.function)?;
    let (raw, prints, image) = (function.raw, function.prints, function.image);
    let (device, local) = (function.device, function.local);
    let writes = function.note_launch();
    let grows = shared.gpu.devices[device].grows(local);
    // The driver reads as many bytes as the kernel's parameters have.
    if body.param_len < function.param_bytes {
        return Err(CUDA_ERROR_INVALID_VALUE.into());
    }
    let mut params = params(message, &body)?;
    let mut translated;
    if session.note_params(params, body.param_len as usize) {
        translated = session.translate(params, body.param_len as usize);
        params = translated.as_mut_ptr();
    }
    if writes {
        session.note_written();
    }
    let grows = grows && !is_capturing(session, body.stream);
    if grows && session.flow.moment.is_none() {
        session.flow.wants = Some(Want::Local(device, local));
        return Err(CallError::Alone);
    }
    if !session.objects.graphs.captures.is_empty() && is_capturing(session, body.stream) {
        // The kernel runs when the graph is launched.
        session.objects.graphs.prints |= prints;
        session.objects.graphs.refer_to(image);
    } else if prints && !may_print(session, &shared.gpu) {
        return Err(CallError::Full);
    }
    let mut size = body.param_len as usize;
    let mut extra = packed(params, &mut size);
    let (index, mut stream) = prepare_work(
        session,
        &shared.gpu,
        body.stream,
        Runs::Function(body.function),
    )?;
    let capturing = session.objects.streams.at(index)?.capturing;
    let function = session.objects.functions.get(body.function)?;
    let fill = function.fills(&shared.gpu, &body);
    if !capturing {
        stream = confine(session, &shared.gpu, index, Some(fill))?;
    }
    let ([gx, gy, gz], [bx, by, bz]) = (body.grid, body.block);
    let none = std::ptr::null_mut();
    let extra = extra.as_mut_ptr();
    let attributes = match body.attributes {
        0 => None,
        _ => Some(attributes(session, message, &body, Some(capturing))?),
    };
    let launch = |stream| {
        let driver = &shared.gpu.driver;
        let shared = body.shared;
        match &attributes {
            None => driver.launch_kernel(raw, gx, gy, gz, bx, by, bz, shared, stream, none, extra),
            Some(attributes) => {
                driver.launch_kernel_ex(&attributes.config(&body, stream), raw, none, extra)
            }
        }
    };
    // A fault may be detected before the launch returns.
    session.shared.launched.note(body.function, index);
    let mut launched = launch(stream);
    // Its clusters, or all blocks of a cooperative kernel, may not fit into a part of the device.
    let confined = session.objects.streams.at(index)?.confined().is_some();
    if launched.is_err_and(|status| confined && !is_sticky(status)) {
        launched = launch(confine(session, &shared.gpu, index, None)?);
    }
    launched?;
    for handle in attributes.map_or_else(Vec::new, |attributes| attributes.records) {
        note_recorded(session, handle, capturing)?;
    }
    session.flow.counts.launches += 1;
    if grows {
        shared.gpu.devices[device].has_grown(local.into());
    }
    submitted_work(session, &shared.gpu, index, Runs::Function(body.function))?;
    note_fill(session, index, fill);
    Ok(())
}

fn params(message: Incoming<'_>, body: &Launch) -> Result<*mut u8, CallError> {
    if body.param_len as usize > PARAMS_MAX {
        return Err(CallError::Violation(format!(
            "{} bytes of kernel parameters",
            body.param_len
        )));
    }
    message.in_place(size_of::<Launch>(), body.param_len as usize)
}

/// Copies the attributes behind the parameters out, and translates the handles in them. `capturing`: whether the
/// stream of the launch captures; `None` if nothing is launched.
pub fn attributes(
    session: &mut Session,
    message: Incoming<'_>,
    body: &Launch,
    capturing: Option<bool>,
) -> Result<Attributes, CallError> {
    let count = body.attributes as usize;
    if count > ATTRIBUTES_MAX {
        return Err(CallError::Violation(format!("{count} launch attributes")));
    }
    let zero = CUlaunchAttribute {
        id: 0,
        pad: 0,
        value: [0; 64],
    };
    let mut attributes = Attributes {
        list: [zero; ATTRIBUTES_MAX],
        count: body.attributes,
        records: Vec::new(),
    };
    let at = size_of::<Launch>() + (body.param_len as usize).next_multiple_of(8);
    let mut bytes = [0u8; ATTRIBUTE];
    for (i, attribute) in attributes.list[..count].iter_mut().enumerate() {
        if !message.copy_out(at + i * ATTRIBUTE, &mut bytes) {
            return Err(CallError::Violation(
                "launch attributes do not fit the message".into(),
            ));
        }
        attribute.id = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        attribute.value.copy_from_slice(&bytes[8..]);
        match attribute.id {
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT
            | CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT => {
                let mut handle = [0; 8];
                handle.copy_from_slice(&attribute.value[..8]);
                let event = session.objects.events.get_mut(u64::from_le_bytes(handle))?;
                // Not allowed for interprocess events.
                if event.shared.is_some() {
                    return Err(CUDA_ERROR_INVALID_VALUE.into());
                }
                if let Some(captured) = capturing {
                    event.may_be_recorded(captured)?;
                    attributes.records.push(u64::from_le_bytes(handle));
                }
                attribute.value[..8].copy_from_slice(&event.raw.0.to_le_bytes());
            }
            CU_LAUNCH_ATTRIBUTE_PRIORITY => {
                let priority = first_word(&attribute.value);
                let device = session.objects.streams.get(body.stream)?.device;
                let level = level(session, device);
                set_first_word(&mut attribute.value, level.priority(priority));
            }
            CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE => {
                return Err(CUDA_ERROR_NOT_SUPPORTED.into());
            }
            CU_LAUNCH_ATTRIBUTE_IGNORE..=CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            | CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING => {}
            // The meaning of any other attribute in a newer driver is unknown here.
            _ => return Err(CUDA_ERROR_INVALID_VALUE.into()),
        }
    }
    Ok(attributes)
}

impl Attributes {
    /// The launch configuration with these attributes; valid as long as `self`.
    pub fn config(&self, body: &Launch, stream: CUstream) -> CUlaunchConfig {
        CUlaunchConfig {
            grid: body.grid,
            block: body.block,
            shared_mem_bytes: body.shared,
            stream,
            attrs: self.list.as_ptr(),
            num_attrs: self.count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::objects::held::{Awaited, Order};
    use crate::engine::testing::{FAULT, Fixture, Function, counts, obeys, others, records};
    use mpsshim_proto::message::stream::EventExport;
    use mpsshim_proto::message::{EventOnStream, Op};
    use std::sync::atomic::{AtomicU64, Ordering};
    use zerocopy::IntoBytes;
    const EVENT: u32 = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;

    /// A launch of a new function in a new stream.
    fn launch(test: &mut Fixture) -> Launch {
        Launch {
            function: test.function(),
            stream: test.stream(),
            grid: [1; 3],
            block: [1; 3],
            param_len: 8,
            ..Launch::default()
        }
    }

    /// An attribute behind 8 bytes of parameters.
    fn with_attribute(id: u32, value: u64) -> Vec<u8> {
        let mut bytes = vec![0; 8 + ATTRIBUTE];
        bytes[8..12].copy_from_slice(&id.to_le_bytes());
        bytes[16..24].copy_from_slice(&value.to_le_bytes());
        bytes
    }

    const LAUNCHES: [(&str, Function); 2] = [
        ("cuLaunchKernel", records as Function),
        ("cuLaunchKernelEx", counts as Function),
    ];

    #[test]
    fn a_launch_needs_a_function_and_a_stream_of_the_session() {
        let mut test = Fixture::new(&LAUNCHES);
        let good = launch(&mut test);
        for function in others(good.function) {
            let body = Launch { function, ..good };
            let status = test.status(Op::Launch, &body, &[0; 8]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{function:#x}");
        }
        for stream in others(good.stream) {
            let body = Launch { stream, ..good };
            let status = test.status(Op::Launch, &body, &[0; 8]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
        }
        assert_eq!((test.calls(), test.session.flow.counts.launches), (0, 0));
        assert_eq!(test.status(Op::Launch, &good, &[0; 8]), CUDA_SUCCESS);
        let raw = test.session.objects.functions.get(good.function);
        let raw = raw.expect("a function").raw.0;
        assert_eq!(test.recorded()[0][..4], [raw, 1, 1, 1]);
        assert_eq!(test.session.flow.counts.launches, 1);
    }

    #[test]
    fn a_launch_with_fewer_parameters_than_the_kernel_has_is_refused() {
        let mut test = Fixture::new(&LAUNCHES);
        let good = launch(&mut test);
        for param_len in [0, 7] {
            let body = Launch { param_len, ..good };
            let status = test.status(Op::Launch, &body, &[0; 8]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{param_len}");
        }
        assert_eq!(test.calls(), 0);
    }

    #[test]
    fn parameters_and_attributes_that_do_not_fit_the_message_break_the_protocol() {
        let mut test = Fixture::new(&LAUNCHES);
        let good = launch(&mut test);
        let most = PARAMS_MAX as u32;
        for (param_len, attributes, rest) in [
            (9, 0, 8),
            (most + 1, 0, PARAMS_MAX + 1),
            (u32::MAX, 0, 8),
            (8, 1, 8 + ATTRIBUTE - 1),
            // They begin at the next multiple of 8.
            (9, 1, 9 + ATTRIBUTE),
            (8, ATTRIBUTES_MAX as u32 + 1, 64 * ATTRIBUTE),
            (8, u32::MAX, 8),
        ] {
            let body = Launch {
                param_len,
                attributes,
                ..good
            };
            let rest = vec![0; rest];
            assert!(
                test.is_violation(Op::Launch, &body, &rest),
                "{param_len} {attributes}"
            );
        }
        assert_eq!((test.calls(), test.session.flow.counts.launches), (0, 0));
    }

    #[test]
    fn an_attribute_that_a_client_may_not_set_is_refused() {
        let mut test = Fixture::new(&LAUNCHES);
        let good = Launch {
            attributes: 1,
            ..launch(&mut test)
        };
        let (event, shared) = (test.event(), test.event());
        let export = EventExport { event: shared };
        assert_eq!(test.status(Op::EventExport, &export, &[]), CUDA_SUCCESS);
        let [null, stale, context] = others(event);
        let updatable = CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE;
        for (id, value, status) in [
            (EVENT, null, CUDA_ERROR_INVALID_HANDLE),
            (EVENT, stale, CUDA_ERROR_INVALID_HANDLE),
            (EVENT, context, CUDA_ERROR_INVALID_HANDLE),
            (EVENT, shared, CUDA_ERROR_INVALID_VALUE),
            (updatable, 0, CUDA_ERROR_NOT_SUPPORTED),
            (u32::MAX, 0, CUDA_ERROR_INVALID_VALUE),
        ] {
            let rest = with_attribute(id, value);
            let refused = test.status(Op::Launch, &good, &rest);
            assert_eq!(refused, status, "{id} {value:#x}");
        }
        assert_eq!((test.calls(), test.session.flow.counts.launches), (0, 0));
    }

    #[test]
    fn a_deferred_launch_that_records_an_event_is_not_overtaken_by_a_wait_for_it() {
        let mut test = Fixture::new(&LAUNCHES);
        let good = Launch {
            attributes: 1,
            ..launch(&mut test)
        };
        let (event, other) = (test.event(), test.stream());
        let wait = |stream| EventOnStream {
            event,
            stream,
            ..EventOnStream::default()
        };
        let order = |test: &mut Fixture, op, bytes: &[u8]| {
            test.session.order(Incoming::copied(op, 0, bytes))
        };
        let launched = |test: &mut Fixture, id| {
            let message = [good.as_bytes(), &with_attribute(id, event)].concat();
            order(test, Op::Launch, &message)
        };
        let at = test.session.objects.streams.index(other).expect("a stream");
        test.session.hold(at, Awaited::passed(u64::MAX));
        assert!(matches!(launched(&mut test, EVENT), Order::Now));
        let at = test.session.objects.streams.index(good.stream);
        test.session
            .hold(at.expect("a stream"), Awaited::passed(u64::MAX));
        let third = wait(test.stream());
        let waits = |test: &mut Fixture| order(test, Op::StreamWaitEvent, third.as_bytes());
        assert!(matches!(launched(&mut test, 0), Order::Taken));
        assert!(matches!(waits(&mut test), Order::Now));
        assert!(matches!(launched(&mut test, EVENT), Order::Taken));
        assert!(matches!(waits(&mut test), Order::Taken));
    }

    static NAMED: AtomicU64 = AtomicU64::new(0);

    /// Keeps the event that a launch names, and [`obeys`].
    extern "C" fn launches_with_event(config: &CUlaunchConfig) -> CUresult {
        // SAFETY: as many attributes as the configuration says.
        let first = unsafe { &*config.attrs };
        let mut event = [0; 8];
        event.copy_from_slice(&first.value[..8]);
        NAMED.store(u64::from_le_bytes(event), Ordering::Relaxed);
        obeys()
    }

    #[test]
    fn a_launch_records_its_event_if_the_driver_launches() {
        let mut test = Fixture::new(&[("cuLaunchKernelEx", launches_with_event as Function)]);
        let body = Launch {
            attributes: 1,
            ..launch(&mut test)
        };
        let event = test.event();
        let rest = with_attribute(EVENT, event);
        for (status, recorded) in [(CUDA_ERROR_NOT_SUPPORTED, false), (CUDA_SUCCESS, true)] {
            test.orders(status);
            assert_eq!(test.status(Op::Launch, &body, &rest), status);
            let event = test.session.objects.events.get(event).expect("an event");
            assert_eq!(event.is_recorded(), recorded);
            assert_eq!(NAMED.load(Ordering::Relaxed), event.raw.0);
        }
    }

    #[test]
    fn a_launch_that_the_driver_refuses_does_not_count_and_a_fault_ends_the_session() {
        for (name, attributes) in [("cuLaunchKernel", 0), ("cuLaunchKernelEx", 1)] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let body = Launch {
                attributes,
                ..launch(&mut test)
            };
            let rest = with_attribute(CU_LAUNCH_ATTRIBUTE_IGNORE, 0);
            for (status, launches) in [(CUDA_ERROR_INVALID_VALUE, 0), (CUDA_SUCCESS, 1)] {
                test.orders(status);
                assert_eq!(test.told(Op::Launch, &body, &rest), status, "{name}");
                assert_eq!(test.session.flow.counts.launches, launches, "{name}");
            }
            assert!(!test.has_ended(), "{name}");
            // Where a launch is measured, the next one waits.
            let body = Launch {
                stream: test.stream(),
                ..body
            };
            test.orders(FAULT);
            assert_eq!(test.told(Op::Launch, &body, &rest), FAULT, "{name}");
            assert!(test.has_ended(), "{name}");
        }
    }
}
