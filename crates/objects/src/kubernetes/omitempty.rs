//! Which fields JSON omits while their value is zero, false or an empty text.
//!
//! Protobuf tells only whether a field was sent, and Kubernetes sends all fields whose Go type is not a pointer. In
//! JSON a field is omitted if its Go type is not a pointer and it is tagged `omitempty`. The proto files contain neither
//! fact, so it is stated here: by the field's name if most types agree, with the types that do not. Newer fields that
//! these names do not cover are pointers by the API conventions, and are shown whenever they were sent.

use std::{collections::HashSet, sync::LazyLock};

/// Reports whether a field with an empty value is absent from the JSON form of a message.
pub(super) fn omits_empty(message: &str, field: &str) -> bool {
    static NAMES: LazyLock<HashSet<&str>> = LazyLock::new(|| OMITTED.split(' ').collect());
    static EXCEPTIONS: LazyLock<HashSet<&str>> =
        LazyLock::new(|| [SHOWN_IN, OMITTED_IN, OMITTED_IN_NEWER].iter().flat_map(|list| list.split(' ')).collect());
    NAMES.contains(field) != EXCEPTIONS.contains(format!("{message}.{field}").as_str())
}

/// Names of fields that most messages omit.
const OMITTED: &str = "\
     $schema action active allowedCapabilities allowedProcMountTypes apiGroup apiVersion audience \
     availableReplicas caBundle chapAuthDiscovery chapAuthSession clientCert clientKey clusterIP clusterName \
     clusterScope component concurrencyPolicy containerID containerName continue controller count currentReplicas \
     currentRevision datasetName datasetUUID defaultAddCapabilities deprecated deprecatedCount description \
     directory dnsPolicy effect error exclusiveMaximum exclusiveMinimum externalID externalName \
     externalTrafficPolicy failed failureThreshold fieldPath fieldsType format fsType fullyLabeledReplicas \
     generateName generation globalDefault group healthCheckNodePort host hostIP hostIPC hostNetwork hostPID \
     hostPort hostname id imagePullPolicy initialDelaySeconds insecureSkipTLSVerify ip iscsiInterface keyring \
     listKind loadBalancerIP manager medium message minReadySeconds namespace nodePort nominatedNodeName note \
     nullable number numberAvailable numberUnavailable observedGeneration operation partition pathPrefix pattern \
     paused periodSeconds persistentVolumeReclaimPolicy phase podCIDR podIP podManagementPolicy pool prefix \
     preserveUnknownFields priorityClassName privileged protectionDomain protocol providerID proxyProtocol \
     publishNotReadyAddresses qosClass readOnly readOnlyRootFilesystem readyReplicas reason reportingController \
     reportingInstance requiredDropCapabilities resource resourceVersion restartPolicy revision schedulerName \
     schedulername scheme secretFile secretName selector selfLink serviceAccount serviceAccountName serviceName \
     sessionAffinity signal singular sizeBytes sslEnabled stdin stdinOnce storageMode storagePolicyID \
     storagePolicyName storagePool subPath subPathExpr subdomain subresource succeeded successThreshold \
     targetContainerName targetSelector templateGeneration tenant terminationMessagePath terminationMessagePolicy \
     title tty udsName uid unavailableReplicas uniqueItems unschedulable updateRevision updatedNumberScheduled \
     updatedReplicas url user userAgent username verb version volumeName volumeNamespace workingDir \
     x-kubernetes-embedded-resource x-kubernetes-int-or-string";

/// Fields that are shown in spite of [`OMITTED`].
const SHOWN_IN: &str = "\
     AzureDiskVolumeSource.fsType AzureDiskVolumeSource.readOnly AzureFilePersistentVolumeSource.secretName \
     AzureFileVolumeSource.secretName CSIVolumeSource.fsType CSIVolumeSource.readOnly Condition.message \
     Condition.reason ConfigMapNodeConfigSource.namespace ControllerRevision.revision \
     CustomResourceDefinitionSpec.group Endpoint.hostname EndpointAddress.ip Event.reportingInstance Event.verb \
     GroupVersionForDiscovery.version HPAScalingPolicy.periodSeconds \
     HorizontalPodAutoscalerStatus.currentReplicas HorizontalPodAutoscalerStatus.observedGeneration \
     IngressClassParametersReference.apiGroup LimitedResource.resource LinuxContainerUser.uid \
     LocalVolumeSource.fsType NetworkPolicyPort.protocol ObjectFieldSelector.fieldPath OwnerReference.apiVersion \
     OwnerReference.controller PortStatus.error PortStatus.protocol Preconditions.resourceVersion \
     ResourceFieldSelector.resource ResourcePool.generation RoleRef.apiGroup \
     RollingUpdateStatefulSetStrategy.partition SecurityContext.privileged SecurityContext.readOnlyRootFilesystem \
     ServiceAccountSubject.namespace StatefulSetSpec.serviceName StorageVersionCondition.reason \
     TableColumnDefinition.description TableColumnDefinition.format Taint.effect TokenRequest.audience \
     TypedLocalObjectReference.apiGroup VolumeNodeResources.count WebhookClientConfig.url";

/// Fields that are omitted although their names are not in [`OMITTED`].
const OMITTED_IN: &str = "\
     BoundObjectReference.kind BoundObjectReference.name CephFSPersistentVolumeSource.path \
     CephFSVolumeSource.path Container.image ContainerPort.name CustomResourceColumnDefinition.priority \
     DaemonSetUpdateStrategy.type DeploymentStatus.replicas DeploymentStrategy.type EndpointPort.name \
     EnvVar.value EphemeralContainerCommon.image Event.type FlowSchemaCondition.status FlowSchemaCondition.type \
     HTTPGetAction.path HTTPIngressPath.path JSONSchemaProps.type LocalObjectReference.name \
     NonResourceAttributes.path ObjectMeta.name ObjectReference.kind ObjectReference.name \
     PersistentVolumeSpec.storageClassName PodDNSConfigOption.name PodSpec.nodeName \
     PriorityLevelConfigurationCondition.status PriorityLevelConfigurationCondition.type Probe.timeoutSeconds \
     ResourceAttributes.name ScaleSpec.replicas Secret.type SecretReference.name ServiceBackendPort.name \
     ServicePort.name ServiceReference.name ServiceSpec.type StatefulSetUpdateStrategy.type Taint.value \
     Toleration.key Toleration.operator Toleration.value TypeMeta.kind";

/// The same for fields that were added later than the rest of the list.
const OMITTED_IN_NEWER: &str = "\
     ClusterTrustBundleSpec.signerName ExactDeviceRequest.allocationMode \
     DeviceSubRequest.allocationMode DeviceTaint.value DeviceToleration.key DeviceToleration.operator \
     DeviceToleration.value JobStatus.completedIndexes LeaseCandidateSpec.emulationVersion \
     NetworkDeviceData.hardwareAddress NetworkDeviceData.interfaceName NodeRuntimeHandler.name ParamKind.kind \
     ParamRef.name PodCertificateProjection.certificateChainPath PodCertificateProjection.credentialBundlePath \
     PodCertificateProjection.keyPath PodStatus.resize ResourceClaim.request \
     ResourceHealth.health Validation.messageExpression ValidationRule.messageExpression";
