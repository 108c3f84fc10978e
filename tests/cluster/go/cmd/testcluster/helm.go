package main

import (
	"errors"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
	helmkube "helm.sh/helm/v4/pkg/kube"
)

func helmMain() {
	helmkube.ManagedFieldsManager = "helm"
	cmd, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	exitOn("helm", err)
	if err := cmd.Execute(); err != nil {
		var coded helm.CommandError
		if errors.As(err, &coded) {
			os.Exit(coded.ExitCode)
		}
		os.Exit(1)
	}
}
