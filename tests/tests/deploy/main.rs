//! mpsshim as it is installed: packages, services, containers, Kubernetes, Slurm, MPI.

mod containers;
mod device_plugin;
mod docker;
mod kubelet;
mod kubernetes;
mod mpi;
mod packaging;
mod service;
mod slurm;
