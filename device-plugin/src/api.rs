//! Kubernetes' device plugin API, version v1beta1: the messages with the field numbers of its public definition
//! (`k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto`), and the paths of its calls. Fields that the plugin does
//! not use (device nodes, annotations, NUMA nodes) are omitted, as protobuf permits.

use std::collections::BTreeMap;

/// Version of the API.
pub const VERSION: &str = "v1beta1";
/// [`Device::health`] of a device that may be allocated.
pub const HEALTHY: &str = "Healthy";
/// [`Device::health`] of a device that may not be allocated.
pub const UNHEALTHY: &str = "Unhealthy";
/// Name of kubelet's socket in the folder of the plugins' sockets.
pub const KUBELET_SOCKET: &str = "kubelet.sock";

/// Paths of the calls.
pub mod path {
    /// At kubelet: [`RegisterRequest`](super::RegisterRequest) to [`Empty`](super::Empty).
    pub const REGISTER: &str = "/v1beta1.Registration/Register";
    /// [`Empty`](super::Empty) to [`Options`](super::Options).
    pub const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
    /// [`Empty`](super::Empty) to a stream of [`Devices`](super::Devices).
    pub const LIST_AND_WATCH: &str = "/v1beta1.DevicePlugin/ListAndWatch";
    /// [`PreferenceRequest`](super::PreferenceRequest) to [`Preference`](super::Preference).
    pub const PREFERENCE: &str = "/v1beta1.DevicePlugin/GetPreferredAllocation";
    /// [`AllocateRequest`](super::AllocateRequest) to [`Allocation`](super::Allocation).
    pub const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";
    /// [`ContainerAllocateRequest`](super::ContainerAllocateRequest) to [`Empty`](super::Empty).
    pub const PRE_START: &str = "/v1beta1.DevicePlugin/PreStartContainer";
}

/// A message without fields; also used for messages whose fields are ignored (`PreStartContainerResponse`).
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Empty {}

/// `DevicePluginOptions`: which calls kubelet is to make.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Options {
    /// [`path::PRE_START`].
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// [`path::PREFERENCE`].
    #[prost(bool, tag = "2")]
    pub preferred_allocation_available: bool,
}

/// A plugin introduces itself.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterRequest {
    /// [`VERSION`].
    #[prost(string, tag = "1")]
    pub version: String,
    /// Name of the plugin's socket in the folder of kubelet's.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// Name of the resource that pods request.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// The same as in the reply to [`path::OPTIONS`].
    #[prost(message, optional, tag = "4")]
    pub options: Option<Options>,
}

/// `ListAndWatchResponse`: all current devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Devices {
    /// In any order.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// A device as kubelet sees it; here a part of a GPU.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Device {
    /// At most 63 bytes.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`] or [`UNHEALTHY`].
    #[prost(string, tag = "2")]
    pub health: String,
}

/// `PreferredAllocationRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferenceRequest {
    /// For each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<ContainerPreferenceRequest>,
}

/// `ContainerPreferredAllocationRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerPreferenceRequest {
    /// Free devices.
    #[prost(string, repeated, tag = "1")]
    pub available: Vec<String>,
    /// Devices that the container must have.
    #[prost(string, repeated, tag = "2")]
    pub must_include: Vec<String>,
    /// Number of devices that the container requests.
    #[prost(int32, tag = "3")]
    pub size: i32,
}

/// `PreferredAllocationResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Preference {
    /// For each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<ContainerPreference>,
}

/// `ContainerPreferredAllocationResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerPreference {
    /// The devices.
    #[prost(string, repeated, tag = "1")]
    pub ids: Vec<String>,
}

/// Allocates devices to the containers of a pod.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateRequest {
    /// For each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<ContainerAllocateRequest>,
}

/// Also used for `PreStartContainerRequest`, which has the same field.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAllocateRequest {
    /// The devices.
    #[prost(string, repeated, tag = "1")]
    pub ids: Vec<String>,
}

/// `AllocateResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Allocation {
    /// For each container.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<ContainerAllocation>,
}

/// `ContainerAllocateResponse`: the environment, mounts and devices for a container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAllocation {
    /// Its environment.
    #[prost(btree_map = "string, string", tag = "1")]
    pub env: BTreeMap<String, String>,
    /// Files and folders.
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
    /// Devices by their names in the Container Device Interface.
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// A file or folder of the node in a container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mount {
    /// Path in the container.
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Path on the node.
    #[prost(string, tag = "2")]
    pub host_path: String,
    /// The container may not write.
    #[prost(bool, tag = "3")]
    pub read_only: bool,
}

/// `CDIDevice`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CdiDevice {
    /// Such as `mpsshim.io/gpu=all`.
    #[prost(string, tag = "1")]
    pub name: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    /// A protobuf field of bytes: tag, length and content.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, bytes.len() as u8], bytes].concat()
    }

    /// In other tests both ends use these messages, so that only this one detects a field number that differs from the
    /// API's.
    #[test]
    fn the_bytes_are_the_api_s() {
        let options = Options {
            pre_start_required: true,
            preferred_allocation_available: true,
        };
        assert_eq!(options.encode_to_vec(), [8, 1, 16, 1]);
        let register = RegisterRequest {
            version: "v".into(),
            endpoint: "e".into(),
            resource_name: "r".into(),
            options: Some(options),
        };
        let fields = [
            field(1, b"v"),
            field(2, b"e"),
            field(3, b"r"),
            field(4, &[8, 1, 16, 1]),
        ];
        assert_eq!(register.encode_to_vec(), fields.concat());

        let device = Device {
            id: "i".into(),
            health: "h".into(),
        };
        let devices = Devices {
            devices: vec![device],
        };
        let fields = [field(1, b"i"), field(2, b"h")].concat();
        assert_eq!(devices.encode_to_vec(), field(1, &fields));

        let preference = PreferenceRequest {
            containers: vec![ContainerPreferenceRequest {
                available: vec!["a".into()],
                must_include: vec!["m".into()],
                size: 3,
            }],
        };
        let fields = [field(1, b"a"), field(2, b"m"), vec![24, 3]].concat();
        assert_eq!(preference.encode_to_vec(), field(1, &fields));
        let ids = || vec!["i".to_owned()];
        let of_ids = field(1, &field(1, b"i"));
        let preference = Preference {
            containers: vec![ContainerPreference { ids: ids() }],
        };
        assert_eq!(preference.encode_to_vec(), of_ids);
        let request = AllocateRequest {
            containers: vec![ContainerAllocateRequest { ids: ids() }],
        };
        assert_eq!(request.encode_to_vec(), of_ids);

        let allocation = Allocation {
            containers: vec![ContainerAllocation {
                env: [("n".into(), "v".into())].into(),
                mounts: vec![Mount {
                    container_path: "c".into(),
                    host_path: "h".into(),
                    read_only: true,
                }],
                cdi_devices: vec![CdiDevice { name: "d".into() }],
            }],
        };
        let fields = [
            field(1, &[field(1, b"n"), field(2, b"v")].concat()),
            field(2, &[field(1, b"c"), field(2, b"h"), vec![24, 1]].concat()),
            field(5, &field(1, b"d")),
        ];
        assert_eq!(allocation.encode_to_vec(), field(1, &fields.concat()));
    }
}
